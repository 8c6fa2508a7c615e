"""A study of Page's bag of tricks: what is trained, and its page."""
