"""One page in the browser: what runs, how it does, and a way to try it (`corral console`)."""
