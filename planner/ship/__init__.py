"""The planned step as a folder of source."""
