"""The input pipeline against others, and its stages."""
