-- needs: run, full
-- Returns the packed infos of live servers; silent ones are removed.
for _, server in ipairs(call('ZRANGEBYSCORE', key('servers_until'), '-inf', now_ms())) do
  call('HDEL', key('servers'), server)
  call('ZREM', key('servers_until'), server)
end
return call('HVALS', key('servers'))
