"""Self-play: opponents, ratings, results by seat, a collapse alarm, exploitability."""
