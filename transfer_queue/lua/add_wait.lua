-- needs: run, full
-- ARGV: role:cause, seconds, nonce.
if first_time(ARGV[3]) then call('HINCRBYFLOAT', key('waits'), ARGV[1], ARGV[2]) end
return 1
