"""The APIs of the server: each turns its requests into a chat, and the answer into its form."""
