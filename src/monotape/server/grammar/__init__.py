"""Structured output: what requests ask for, and the processes that compile and follow it."""
