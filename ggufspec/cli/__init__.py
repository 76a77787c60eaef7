"""The command line: one file a command. Options in, library calls, text out; no arithmetic."""
