"""A study of the cheaper ways to decode JPEGs: its data, what is trained, and its table."""
