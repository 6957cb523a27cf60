"""The page itself: figures, controls and the loopback server. It sees only Frames."""
