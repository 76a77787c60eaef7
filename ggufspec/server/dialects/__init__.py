"""The APIs of the server: each converts its requests to chats, and answers to its own form."""
