"""The decode role: receives prompts and generates."""
