"""SGLang's `/generate`: what is sent, and what an answer says."""
