"""Options of a generation: what each is, and a request of checked ones."""
