-- Living servers, as they described themselves; those that missed their heartbeat are struck off.
local now = now_ms()
for _, name in ipairs(redis.call('ZRANGEBYSCORE', P .. ':heartbeats', '-inf', now)) do
  redis.call('ZREM', P .. ':heartbeats', name)
  redis.call('HDEL', P .. ':servers', name)
end
return redis.call('HVALS', P .. ':servers')
