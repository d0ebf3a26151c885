"""Tables on screen and on disk, labelled pictures, and the report."""
