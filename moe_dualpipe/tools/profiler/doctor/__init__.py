"""Say why communication is exposed, what to change, and how much time each change would save."""
