"""Results of the commands, their tables and sentences, and the HTML page."""
