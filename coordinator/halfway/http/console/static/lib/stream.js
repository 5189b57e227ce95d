// Server-sent events over fetch(), because EventSource cannot send an Authorization header.

const MAX_CHARACTERS = 16 * 1024 * 1024;

// Yields {event, data} for each event, and null for each comment (heartbeat), until the connection ends.
export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let event = { event: "message", data: [] };
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      rest += value;
      if (rest.length > MAX_CHARACTERS) throw new Error("a line of the event stream is too long");
      const lines = rest.split("\n");
      rest = lines.pop();
      for (const raw of lines) {
        const line = raw.endsWith("\r") ? raw.slice(0, -1) : raw;
        if (line === "") {
          if (event.data.length > 0) yield { event: event.event, data: event.data.join("\n") };
          event = { event: "message", data: [] };
        } else if (line.startsWith(":")) {
          yield null;
        } else {
          const [, field, text] = /^([^:]*):? ?(.*)$/s.exec(line);
          if (field === "event") event.event = text;
          if (field === "data") event.data.push(text);
        }
      }
    }
  } finally {
    await reader.cancel().catch(() => {});
  }
}
