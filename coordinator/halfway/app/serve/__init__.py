"""The process `halfway serve`: the composition root, what it starts and stops, and how it uses the interpreter."""
