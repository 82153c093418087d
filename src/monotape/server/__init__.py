"""The HTTP server: OpenAI's and Anthropic's interfaces in front of one engine process."""
