"""What people read: tables that fit a terminal; saved runs as a page there, or as one self-contained HTML file."""
