"""Exported models against each other."""
