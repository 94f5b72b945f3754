"""The HTTP interfaces that agent programs speak: bodies to requests, replies to bodies and event streams."""
