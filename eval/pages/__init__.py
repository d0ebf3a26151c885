"""Tables on screen and on disk, labelled images, and the report."""
