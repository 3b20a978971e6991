-- needs: run, full
-- ARGV: packed update, nonce.
if first_time(ARGV[2]) then call('RPUSH', key('updates'), ARGV[1]) end
return 1
