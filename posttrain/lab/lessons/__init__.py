"""The pages, one file each, in a folder for each part of the curriculum."""
