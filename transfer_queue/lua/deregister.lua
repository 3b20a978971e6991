-- needs: run, full
-- ARGV: server id.
call('HDEL', key('servers'), ARGV[1])
call('ZREM', key('servers_until'), ARGV[1])
return 1
