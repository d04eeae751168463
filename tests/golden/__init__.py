"""Small files in every format, and the episodes that they hold."""
