"""One module per kind of file. Each turns its content into `Group`s, and imports what it needs when it is used."""
