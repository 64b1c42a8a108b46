"""The training loop, one step's algebra, evaluation and sampling."""
