"""Problems with a number for an answer."""
