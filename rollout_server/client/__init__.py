"""The routing client: which server is asked, and how an answer continues elsewhere."""
