"""Models, data and closed-loop training runs to ask questions with."""
