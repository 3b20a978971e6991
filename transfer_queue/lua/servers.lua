-- needs: run
-- Returns the packed infos of live servers. Only reads: those that ask may not write them.
local live = call('ZRANGEBYSCORE', key('servers_until'), '(' .. now_ms(), '+inf')
if #live == 0 then return {} end
return call('HMGET', key('servers'), unpack(live))
