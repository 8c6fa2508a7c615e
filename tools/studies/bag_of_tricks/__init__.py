"""A study of Page's bag of tricks: its experiments and page."""
