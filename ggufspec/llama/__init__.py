"""Models, contexts and sessions of llama.cpp; importing one of its modules loads libllama."""
