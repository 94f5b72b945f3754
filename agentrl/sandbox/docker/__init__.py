"""The backend ``docker``: a container per sandbox."""
