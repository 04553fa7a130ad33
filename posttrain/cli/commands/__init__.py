"""The commands by subject: the arguments of each (`add_NAME`) and what it does. Each imports what it needs when it is
called."""
