"""The page at `/`: a chat with tokens colored by draft position, and engine activity."""
