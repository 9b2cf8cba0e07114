// The process that keeps the namespaces of a pod: it reaps orphans and ends on a signal.
package main

import (
	"os"
	"os/signal"
	"syscall"
)

func main() {
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGCHLD)
	for received := range signals {
		if received != syscall.SIGCHLD {
			os.Exit(0)
		}
		for {
			if id, _ := syscall.Wait4(-1, nil, syscall.WNOHANG, nil); id <= 0 {
				break
			}
		}
	}
}
