"""The engine process, the messages between it and the server, and the server's end of them."""
