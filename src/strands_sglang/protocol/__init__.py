"""SGLang's `/generate` protocol: requests, and typed responses."""
