"""The study of five fast systems, their ingredients, and a recipe of our own, at equal seconds."""
