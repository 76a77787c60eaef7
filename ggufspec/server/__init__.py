"""An HTTP server over one engine, with the APIs of OpenAI, Anthropic and Ollama."""
