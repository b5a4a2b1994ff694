"""Workers on this machine: started, watched and restarted by torch's elastic agent."""
