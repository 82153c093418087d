"""Harmony, the format of gpt-oss: messages on channels, rendered and read with their marks as tokens of their own."""
