"""The HTTP server: OpenAI's API over one engine that decodes many requests together."""
