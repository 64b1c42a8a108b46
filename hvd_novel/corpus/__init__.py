"""From novels in files to a token store: read, clean, split into chapters, tokenise, cut into samples, store."""
