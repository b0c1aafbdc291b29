"""The page at `/`: a chat whose text shows who gave each token, and what the engine does."""
