"""The formats, one file each: what a call looks like, and the parser that reads it."""
