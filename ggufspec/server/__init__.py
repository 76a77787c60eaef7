"""An HTTP server with OpenAI's API over one engine."""
