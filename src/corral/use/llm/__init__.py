"""The Python face of a served model, and chats in a terminal."""
