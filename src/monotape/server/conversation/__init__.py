"""From a conversation to a prompt, and from the model's text back to thoughts, words and calls."""
