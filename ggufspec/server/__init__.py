"""An HTTP server with OpenAI's API over one engine. Knows no command line, and prints nothing."""
